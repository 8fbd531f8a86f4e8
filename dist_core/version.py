"""The version of the whole suite; packages, chart and documentation take it from here."""

__version__ = "0.1.0"
