"""What this machine reaches: measured by microkernels, beside the data sheet."""
