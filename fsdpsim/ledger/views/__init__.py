"""What ``fsdpsim ledger`` shows: each module has ``report`` (JSON) and ``tables`` (terminal)."""
