"""Output of the commands: tables, progress, results. Nothing here acts."""
