"""Child processes: how one is asked, limited and ended."""
