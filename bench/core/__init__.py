"""One measurement: kernel and case, check, time, roof, record."""
