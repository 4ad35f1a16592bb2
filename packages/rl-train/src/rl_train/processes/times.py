"""The time limits that all processes share."""

# Seconds between signs of life.
LIFE_SECONDS = 0.5
# Seconds until the first sign of life of a process that may still start, and imports torch.
START_SECONDS = 120.0
# After a deadline: a caller that was stopped (Ctrl-Z) and continues first reads the messages that have arrived.
PATIENCE_SECONDS = 0.1
# Seconds without a sign of life after which an event loop counts as blocked, beyond the limit of one blocking call.
BLOCKED_SECONDS = 10.0
# Seconds in which a killed process, with all processes below it, has ended.
END_SECONDS = 5.0
# Seconds to wait for the other ranks after a rank has failed: they may wait in a collective that never ends.
REPORT_SECONDS = 5.0
# The same after a RuntimeError on Ray: a collective raises it when a peer died, and Ray may notice a lost node later.
DEATH_SECONDS = 40.0
