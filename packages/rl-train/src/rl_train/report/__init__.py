"""Reports of a run: the terminal, metrics and samples, the HTML report, loggers."""
