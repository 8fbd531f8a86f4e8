"""Replicas forked from a process that has their imports in memory: who starts it, serves it and asks it."""
