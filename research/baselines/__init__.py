"""A method that the paper compares with: CALM*."""
