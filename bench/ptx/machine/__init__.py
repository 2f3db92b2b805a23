"""What a kernel runs on: lanes, memory, barriers, copies in flight, and who goes next."""
