"""The counting cores (pure) and the Faust application around them."""
