// Replays one call outside Python, on an emulated processor or under sanitizers.
//
// driver FILE: an image of memory in which some words are pointers. Sets the pointers, runs the call, restores the words and
// writes the image back.

#include <cstdio>
#include <cstdlib>

#include "step.h"

namespace {

struct Header {
  int64_t vector_bytes, num_bytes, num_pointers, model, call;
};

// Offsets of a pointer in the image and of its target.
struct Pointer {
  int64_t at, to;
};

}  // namespace

int main(int, char** arguments) {
  Header header;
  std::FILE* file = std::fopen(arguments[1], "r+b");
  if (!file || std::fread(&header, sizeof header, 1, file) != 1 || header.vector_bytes != nvium::kVectorBytes) return 2;
  std::vector<Pointer> pointers(header.num_pointers);
  if (std::fread(pointers.data(), sizeof(Pointer), pointers.size(), file) != pointers.size()) return 3;
  const size_t num_bytes = header.num_bytes;
  char* const memory = static_cast<char*>(std::aligned_alloc(64, num_bytes));
  const long start = std::ftell(file);
  if (std::fread(memory, 1, num_bytes, file) != num_bytes) return 4;
  const auto word = [&](const Pointer& pointer) -> char*& { return *reinterpret_cast<char**>(memory + pointer.at); };
  std::vector<char*> before;
  for (const Pointer& each : pointers) before.push_back(word(each)), word(each) = memory + each.to;
  const auto& model = *reinterpret_cast<const nvium::Model<float>*>(memory + header.model);
  nvium::StepRun<float>(model, *reinterpret_cast<nvium::Call*>(memory + header.call)).run();
  for (size_t i = 0; i < pointers.size(); ++i) word(pointers[i]) = before[i];
  std::fseek(file, start, SEEK_SET);
  if (std::fwrite(memory, 1, num_bytes, file) != num_bytes) return 5;
  std::free(memory);
  return std::fclose(file);
}
