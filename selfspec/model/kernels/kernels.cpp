// All compiled code in one library, so that shared parts are compiled once.

#include "layers.hpp"
#include "weights.hpp"
