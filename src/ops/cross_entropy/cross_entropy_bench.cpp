// Placeholder.
#include "testing/benchmark.h"
