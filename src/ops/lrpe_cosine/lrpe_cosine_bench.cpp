#include "testing/benchmark.h"
