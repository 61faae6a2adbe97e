"""What zl measures of itself: the list of families, their collection at scrape, the HTTP port that shows them."""
