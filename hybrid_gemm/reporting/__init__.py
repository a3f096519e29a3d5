"""Results for people and files: tables, plots, traces, the environment."""
