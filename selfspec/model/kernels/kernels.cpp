// All compiled code, in one library: what weights and layers share is compiled once.

#include "layers.hpp"
#include "weights.hpp"
