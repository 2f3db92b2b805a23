"""Watches a user's file of kernels, and shows on a page of this machine what each save changed."""
