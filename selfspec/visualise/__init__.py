"""What each layer made of each token: looked at, drawn, told. Imports no drawing library itself."""
