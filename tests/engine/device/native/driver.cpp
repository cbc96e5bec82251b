// Runs Steps and scores rows for a test, away from Python: where another processor is emulated, or under sanitizers.
//
// driver FILE: an image of memory, whose pointers are offsets until they are relocated, is read, worked on and written back.

#include <cstdio>
#include <cstdlib>

#include "score.h"
#include "step.h"

namespace {

struct Call {
  nvium::Step* steps;
  int64_t count;
  const nvium::Tensors<float>* tensors;
  int64_t num_threads;
  const nvium::Exit<float>* const* exits;
  const nvium::Scores* scores;
};

struct Header {
  int64_t vector_bytes, num_bytes, num_relocations, call;
};

}  // namespace

int main(int, char** arguments) {
  Header header;
  std::FILE* file = std::fopen(arguments[1], "r+b");
  if (!file || std::fread(&header, sizeof header, 1, file) != 1 || header.vector_bytes != nvium::kVectorBytes) return 2;
  std::vector<int64_t> relocations(header.num_relocations);
  char* const memory = static_cast<char*>(std::aligned_alloc(64, header.num_bytes));
  if (std::fread(relocations.data(), 8, relocations.size(), file) != relocations.size()) return 3;
  const long start = std::ftell(file);
  if (std::fread(memory, 1, header.num_bytes, file) != static_cast<size_t>(header.num_bytes)) return 4;
  for (int64_t at : relocations) *reinterpret_cast<char**>(memory + at) += reinterpret_cast<intptr_t>(memory);
  const Call& call = *reinterpret_cast<Call*>(memory + header.call);
  if (nvium::run<float>(call.steps, call.count, true, call.tensors, call.num_threads) != call.count) return 5;
  const nvium::Step& last = call.steps[call.count - 1];
  nvium::score<float>(*last.exit_shape, call.exits, call.count, call.tensors->states, last.shape->num_slots, *call.scores,
                      call.num_threads);
  std::fseek(file, start, SEEK_SET);
  if (std::fwrite(memory, 1, header.num_bytes, file) != static_cast<size_t>(header.num_bytes)) return 6;
  std::free(memory);
  return std::fclose(file);
}
