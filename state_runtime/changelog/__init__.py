"""The changelog: one segment an epoch; format, writer, reader."""
