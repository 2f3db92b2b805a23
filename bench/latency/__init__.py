"""From kernels to latency: where a step's time goes, what another kernel would change, and the engine on a clock."""
