"""Trials on Kubernetes: their resources, the store that the API server is, and replicas as pods.

What goes into a manifest and what is read out of one are pure functions; `client` alone talks to the server.
Nothing here needs more than Kubernetes 1.20.
"""
