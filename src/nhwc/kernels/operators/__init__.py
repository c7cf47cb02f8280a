"""The kernels as torch's custom operators `nhwc::...`."""
