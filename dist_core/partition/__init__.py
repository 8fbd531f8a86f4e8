"""How a model that is too large for one device is cut into stages: what blocks cost, and where cuts lie best."""
