"""Scheduler of slots: which trial gets which, and when. Never imports torch."""
