"""Alembic's folder: one file for each step between two versions of the tables."""
