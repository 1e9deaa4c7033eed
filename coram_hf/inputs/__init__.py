"""Reading weights, independently of any merge method."""
