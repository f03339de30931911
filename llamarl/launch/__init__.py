"""From a configuration to a job that can run."""
