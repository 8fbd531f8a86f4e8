"""Scripts that run under another project's interpreter; they import nothing of ours."""
