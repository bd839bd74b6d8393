"""Soaks: the real driver and tasks, killed and started again for as long as one likes; run by hand, reports in `reports/`."""
