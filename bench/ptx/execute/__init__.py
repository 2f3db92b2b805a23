"""What generated code calls: instructions that are more than arithmetic on each lane."""
