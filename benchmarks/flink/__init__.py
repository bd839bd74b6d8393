"""NEXMark and restarts beside Apache Flink: `python -m benchmarks.flink --help`."""
