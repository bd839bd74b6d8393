"""The commands of `stillstate`, a module for each topic; `stillstate.orchestration.cli` puts them together."""
