"""What commands show: tables, progress, results. Nothing here acts."""
