"""What a run shows and keeps: the terminal, metrics and samples, the HTML report, loggers."""
