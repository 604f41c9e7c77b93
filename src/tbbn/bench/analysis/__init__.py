"""What is behind a result: shares of tasks in the statistics, drift of running statistics, and the choice of epoch."""
