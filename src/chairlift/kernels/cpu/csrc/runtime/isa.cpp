#include "runtime/isa.h"

#include <cstdlib>
#include <stdexcept>

#if defined(CHAIRLIFT_X86)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace chairlift {

namespace {

#if defined(CHAIRLIFT_HAS_avx512_vnni)

// Whether the CPU has tiles with int8 and bfloat16 products (and then AVX-512 BF16), and the kernel lets this process use them. The kernel saves
// the 8 KiB of tile data only for processes that request it (Documentation/arch/x86/xstate.rst in Linux).
bool can_use_tiles() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25, kAll = kBf16 | kTile | kInt8;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

#endif

// The instruction sets of this CPU, from the fastest to the slowest.
std::vector<const IsaTable*> tables() {
  std::vector<const IsaTable*> found;
#if defined(CHAIRLIFT_X86)
  __builtin_cpu_init();
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool has_f16c = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c;
#if defined(CHAIRLIFT_HAS_avx512)
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#if defined(CHAIRLIFT_HAS_avx512_vnni)
  const bool has_vnni = has_avx512 && __builtin_cpu_supports("avx512vnni");
  const bool has_bf16 = has_vnni && __builtin_cpu_supports("avx512bf16");
  static const bool has_tiles = has_bf16 && can_use_tiles();
  if (has_tiles) found.push_back(&amx::table());
  if (has_bf16) found.push_back(&avx512_bf16::table());
  if (has_vnni) found.push_back(&avx512_vnni::table());
#endif
  if (has_avx512) found.push_back(&avx512::kTable);
#endif
#if defined(CHAIRLIFT_HAS_avx_vnni)
  const bool has_avx_vnni = has_avx2 && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & (1u << 4));
  if (has_avx_vnni) found.push_back(&avx_vnni::table());
#endif
  if (has_avx2) found.push_back(&avx2::kTable);
#endif
  found.push_back(&CHAIRLIFT_LEAST_ISA::kTable);
#if defined(CHAIRLIFT_X86)
  if (has_avx2) found.push_back(&amx_emulated::table());
#endif
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
