"""The old name of `bench/emulator`, for one release."""
