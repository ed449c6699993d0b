#include "isa.h"

#include <cstdlib>
#include <stdexcept>

#if defined(CHAIRLIFT_X86)
#include <cpuid.h>
#endif

namespace chairlift {

namespace portable { extern const IsaTable kTable; }
#if defined(CHAIRLIFT_X86)
namespace avx2 { extern const IsaTable kTable; }
namespace avx_vnni { extern const IsaTable kTable; }
namespace avx512 { extern const IsaTable kTable; }
namespace avx512_vnni { extern const IsaTable kTable; }
#endif

namespace {

std::vector<const IsaTable*> tables() {
  std::vector<const IsaTable*> found;
#if defined(CHAIRLIFT_X86)
  __builtin_cpu_init();
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c;
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool has_avx_vnni = has_avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4));
  if (has_avx512 && __builtin_cpu_supports("avx512vnni")) found.push_back(&avx512_vnni::kTable);
  if (has_avx512) found.push_back(&avx512::kTable);
  if (has_avx_vnni) found.push_back(&avx_vnni::kTable);
  if (has_avx2) found.push_back(&avx2::kTable);
#endif
  found.push_back(&portable::kTable);
  return found;
}

const IsaTable* by_name(const std::string& name) {
  std::string known;
  for (const IsaTable* table : tables()) {
    if (name == table->name) return table;
    known += (known.empty() ? "" : ", ") + std::string(table->name);
  }
  throw std::runtime_error("CHAIRLIFT_CPU_ISA must be one of " + known + " on this CPU, got '" + name + "'");
}

const IsaTable* chosen() {
  const char* name = std::getenv("CHAIRLIFT_CPU_ISA");
  return name && *name ? by_name(name) : tables().front();
}

const IsaTable*& current() {
  static const IsaTable* table = chosen();
  return table;
}

}  // namespace

const IsaTable& isa() { return *current(); }

void set_isa(const std::string& name) { current() = by_name(name); }

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const IsaTable* table : tables()) names.emplace_back(table->name);
  return names;
}

}  // namespace chairlift
