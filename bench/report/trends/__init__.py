"""Shows committed records over time.  Each kernel, case, scheme and machine has one trend, with the steps in it."""
