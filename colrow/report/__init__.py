"""Pages: one self-contained HTML file each, from numbers that other packages made. Nothing is computed here but layout."""
