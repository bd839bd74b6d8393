"""Snapshots in another format, in a folder of their own, compared with their source before they are published."""
