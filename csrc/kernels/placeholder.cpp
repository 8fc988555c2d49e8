// Removed as soon as the first kernel file exists.
