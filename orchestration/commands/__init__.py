"""The commands of `stillstate`, a module for each topic; `orchestration.cli` puts them together."""
