"""What PTX does to numbers: pure functions on scalars and vectors of lanes."""
