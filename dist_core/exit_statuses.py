"""Exit statuses of a replica that say more than whether it failed."""

from __future__ import annotations

EXIT_PREEMPTED = 143
"""It saved its state and left because it was told to (128 + SIGTERM)."""

EXIT_PEER_LOST = 75
"""It stopped because another one vanished (EX_TEMPFAIL): not the user's failure."""

EXIT_LEFT = 77
"""Of a command within a replica: it left its trial, which trains on without it or is paused."""

EXIT_JOIN_AGAIN = 76
"""Of a command within a replica: its training came too late to join, and it is to run again."""
