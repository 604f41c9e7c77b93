"""Analyses that explain results: shares of tasks in the statistics, drift of running statistics, the choice of epoch, slots."""
