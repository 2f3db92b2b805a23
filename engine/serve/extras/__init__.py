"""What a server may have beside: several engines behind Ray Serve or in Kubernetes, and traces of its requests."""
