"""The methods that the paper compares with: CALM* and LayerSkip."""
