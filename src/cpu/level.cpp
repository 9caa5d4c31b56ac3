// The smallest file that is compiled once per level of vector instructions. Each copy knows the name of its level, and
// a call reaches the level that an operator's call would reach.
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/level.cpp"
#include <hwy/foreach_target.h>  // first: compiles this file once per level of vector instructions
#include <hwy/highway.h>

#include "cpu/level.h"

HWY_BEFORE_NAMESPACE();
namespace eaves::cpu {
namespace HWY_NAMESPACE {

const char* level_name_here() { return hwy::TargetName(HWY_TARGET); }

}  // namespace HWY_NAMESPACE
}  // namespace eaves::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace eaves::cpu {
namespace {
HWY_EXPORT(level_name_here);
}  // namespace

const char* level_name() { return HWY_DYNAMIC_DISPATCH(level_name_here)(); }

}  // namespace eaves::cpu
#endif  // HWY_ONCE
