"""What is done for a job that runs anyway: deletions, verification, drills. Commands and Dagster's runs call it."""
