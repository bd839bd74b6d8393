"""Snapshots in another format, in a separate folder, compared with their source before they are published."""
