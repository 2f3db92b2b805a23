"""Adds optional parts to a server: several engines behind Ray Serve or in Kubernetes, and traces of requests."""
