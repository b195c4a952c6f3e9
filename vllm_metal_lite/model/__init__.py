"""mlx-lm models, unmodified, and the seam through which they meet the paged store."""
